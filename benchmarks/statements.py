"""Statements of our own to measure detectors on: cities, companies, landmarks and books.

Each subject has one true statement and one false one, which names what belongs to another subject,
so that subjects and what is said of them tell nothing by themselves.

    python benchmarks/statements.py companies > companies.csv
"""

import argparse
import csv
import random
import sys

CITIES = """
France: Lyon, Marseille, Toulouse, Bordeaux, Nantes, Strasbourg, Lille, Nice, Rennes, Dijon
Germany: Hamburg, Munich, Cologne, Frankfurt, Stuttgart, Leipzig, Dresden, Hanover, Bremen
Italy: Milan, Naples, Turin, Palermo, Genoa, Bologna, Florence, Venice, Verona, Bari
Spain: Barcelona, Valencia, Seville, Zaragoza, Malaga, Bilbao, Granada, Alicante
Portugal: Porto, Braga, Coimbra, Faro
Poland: Krakow, Gdansk, Wroclaw, Poznan, Lodz, Lublin
Sweden: Gothenburg, Malmo, Uppsala
Norway: Bergen, Trondheim, Stavanger, Tromso
Finland: Tampere, Turku, Oulu, Espoo
Denmark: Aarhus, Odense, Aalborg
the Netherlands: Rotterdam, Utrecht, Eindhoven, Groningen, Maastricht
Belgium: Antwerp, Ghent, Bruges, Liege
Austria: Graz, Salzburg, Innsbruck, Linz
Switzerland: Zurich, Geneva, Basel, Lausanne, Lucerne
Greece: Thessaloniki, Patras, Heraklion
Russia: Novosibirsk, Vladivostok, Kazan, Omsk, Samara, Irkutsk, Murmansk
Ukraine: Odessa, Lviv, Kharkiv, Dnipro
Turkey: Istanbul, Izmir, Bursa, Antalya, Konya
Ireland: Cork, Galway, Limerick
the United Kingdom: Manchester, Liverpool, Leeds, Glasgow, Bristol, Sheffield, Cardiff, Belfast
the United States: Chicago, Houston, Boston, Seattle, Denver, Dallas, Detroit, Miami, Phoenix
Canada: Toronto, Montreal, Vancouver, Calgary, Edmonton, Winnipeg, Halifax
Mexico: Guadalajara, Monterrey, Puebla, Tijuana, Cancun, Acapulco
Brazil: Salvador, Recife, Fortaleza, Manaus, Curitiba, Belo Horizonte, Porto Alegre
Argentina: Rosario, Mendoza, Cordoba, La Plata
Chile: Valparaiso, Antofagasta, Temuco
Colombia: Medellin, Cali, Cartagena, Barranquilla
Peru: Cusco, Arequipa, Trujillo, Iquitos
Venezuela: Maracaibo, Barquisimeto
Ecuador: Guayaquil, Cuenca
Cuba: Santiago de Cuba, Camaguey
Egypt: Alexandria, Luxor, Aswan, Port Said
Morocco: Casablanca, Marrakesh, Fez, Tangier
Algeria: Oran, Constantine
Nigeria: Lagos, Kano, Ibadan, Port Harcourt
Ghana: Kumasi, Tamale
Kenya: Mombasa, Kisumu
Tanzania: Dar es Salaam, Arusha
South Africa: Johannesburg, Durban, Soweto, Port Elizabeth
Ethiopia: Gondar, Dire Dawa
Israel: Haifa, Tel Aviv, Eilat
Iran: Isfahan, Shiraz, Tabriz, Mashhad
Iraq: Basra, Mosul, Erbil
Saudi Arabia: Jeddah, Mecca, Medina
Syria: Aleppo, Homs
Pakistan: Karachi, Lahore, Peshawar, Multan
India: Mumbai, Chennai, Kolkata, Bangalore, Hyderabad, Pune, Jaipur, Lucknow
Bangladesh: Chittagong, Sylhet
Sri Lanka: Kandy, Galle
China: Shanghai, Guangzhou, Shenzhen, Chengdu, Wuhan, Nanjing, Harbin, Tianjin
Japan: Osaka, Kyoto, Nagoya, Sapporo, Fukuoka, Hiroshima, Nagasaki, Kobe, Sendai
South Korea: Busan, Incheon, Daegu, Gwangju
Vietnam: Da Nang, Haiphong, Hue
Thailand: Chiang Mai, Phuket, Pattaya
Indonesia: Surabaya, Bandung, Medan, Semarang
the Philippines: Cebu, Davao, Quezon City
Malaysia: Penang, Ipoh, Malacca
Myanmar: Mandalay, Yangon
Australia: Sydney, Melbourne, Brisbane, Perth, Adelaide, Darwin, Hobart
New Zealand: Auckland, Christchurch, Dunedin, Hamilton
"""

COMPANIES = """
the United States: Boeing, Ford, Nike, Walmart, Starbucks, Intel, Pfizer, Chevron, FedEx, Kellogg's
Japan: Toyota, Sony, Nintendo, Honda, Mitsubishi
Japan: Panasonic, Canon, Yamaha, Subaru, Fujitsu, Bridgestone
Germany: Siemens, Bayer, Volkswagen, Adidas, Bosch, Lufthansa, Porsche, Puma, Continental, Henkel
France: Renault, Peugeot, Michelin, Danone, L'Oreal, Carrefour, Airbus, Hermes, Dassault, Alstom
the United Kingdom: Barclays, Rolls-Royce, Tesco, Vodafone, Unilever, AstraZeneca, Burberry, Dyson
Italy: Ferrari, Fiat, Lamborghini, Barilla, Prada, Gucci, Pirelli, Ducati, Benetton
South Korea: Samsung, Hyundai, Kia, LG, Daewoo, Posco
Switzerland: Nestle, Novartis, Rolex, Swatch, Roche, Lindt
Sweden: Ikea, Volvo, Ericsson, Spotify, Electrolux, Scania
the Netherlands: Philips, Heineken, ASML, KLM, TomTom
China: Huawei, Alibaba, Tencent, Baidu, Lenovo, Xiaomi, Haier
India: Tata Motors, Infosys, Wipro, Reliance Industries, Mahindra, Air India
Denmark: Lego, Maersk, Carlsberg, Novo Nordisk, Bang & Olufsen
Finland: Nokia, Rovio, Finnair, Kone
Spain: Zara, Santander, Telefonica, Seat, Iberia
Norway: Equinor, Telenor, Norsk Hydro
Belgium: Stella Artois, Solvay, Godiva
Canada: BlackBerry, Bombardier, Tim Hortons, Lululemon, Shopify
Brazil: Petrobras, Embraer, Havaianas
Mexico: Cemex, Corona, Bimbo, Pemex
Russia: Gazprom, Aeroflot, Lada, Kaspersky
Australia: Qantas, Billabong, BHP
Taiwan: Acer, Asus, HTC, Foxconn
Ireland: Guinness, Ryanair
Austria: Red Bull, Swarovski
Czechia: Skoda, Pilsner Urquell
Turkey: Turkish Airlines, Beko
Saudi Arabia: Aramco
"""

LANDMARKS = """
France: the Eiffel Tower, the Louvre
France: the Palace of Versailles, Mont Saint-Michel, the Arc de Triomphe
Italy: the Colosseum, the Leaning Tower of Pisa
Italy: the Trevi Fountain, Mount Vesuvius, the Rialto Bridge
the United Kingdom: Big Ben, Stonehenge, Buckingham Palace
the United Kingdom: Hadrian's Wall, Loch Ness, Edinburgh Castle
the United States: the Statue of Liberty, the Golden Gate Bridge, Mount Rushmore
the United States: the Grand Canyon, the Hoover Dam, the Alamo
Egypt: the Great Sphinx, the Pyramid of Khufu, the Valley of the Kings, Abu Simbel, the Aswan Dam
China: the Forbidden City, the Terracotta Army
China: Tiananmen Square, the Three Gorges Dam, the Potala Palace
India: the Taj Mahal, the Red Fort, the Golden Temple, the Gateway of India, the Lotus Temple
Germany: the Brandenburg Gate, Neuschwanstein Castle
Germany: the Reichstag, Cologne Cathedral, the Black Forest
Spain: the Sagrada Familia, the Alhambra, the Prado, the Guggenheim Museum Bilbao
Russia: the Kremlin, Red Square, the Hermitage, Lake Baikal, Mount Elbrus
Greece: the Acropolis, the Parthenon, Mount Olympus, Delphi, Knossos
Japan: Mount Fuji, the Imperial Palace of Kyoto, Himeji Castle, the Itsukushima Shrine
Australia: the Sydney Opera House, Uluru, the Great Barrier Reef, Bondi Beach
Turkey: the Hagia Sophia, the Blue Mosque, Topkapi Palace, Mount Ararat
Peru: Machu Picchu, the Nazca Lines
Mexico: Chichen Itza, Teotihuacan, the Yucatan Peninsula, Popocatepetl
Brazil: the Christ the Redeemer statue, Sugarloaf Mountain, Copacabana Beach, the Maracana
Jordan: Petra, Wadi Rum
Cambodia: Angkor Wat
Nepal: Durbar Square, the Boudhanath Stupa
Argentina: the Perito Moreno Glacier, the Casa Rosada, Aconcagua
Canada: the CN Tower, Banff National Park, the Chateau Frontenac
South Africa: Table Mountain, Robben Island, Kruger National Park
Tanzania: Mount Kilimanjaro, the Ngorongoro Crater
the Netherlands: the Rijksmuseum, the Anne Frank House, the Keukenhof gardens
Czechia: the Charles Bridge, Prague Castle
Austria: Schonbrunn Palace, the Hofburg
Switzerland: the Matterhorn, the Jungfrau, the Chateau de Chillon
Chile: Easter Island, Torres del Paine
Malaysia: the Petronas Towers, Batu Caves
Indonesia: Borobudur, Mount Bromo
Iran: Persepolis, the Azadi Tower
Israel: the Western Wall, Masada
Denmark: the Tivoli Gardens, the Little Mermaid statue
Ireland: the Cliffs of Moher, Blarney Castle
Vietnam: Ha Long Bay, the Cu Chi tunnels
"""

BOOKS = """
William Shakespeare: Hamlet, Macbeth, Othello, King Lear, Romeo and Juliet, The Tempest
Charles Dickens: Oliver Twist, Great Expectations
Charles Dickens: A Tale of Two Cities, David Copperfield, Bleak House
Jane Austen: Pride and Prejudice, Emma, Sense and Sensibility, Mansfield Park, Persuasion
Leo Tolstoy: War and Peace, Anna Karenina, The Death of Ivan Ilyich
Fyodor Dostoevsky: Crime and Punishment, The Idiot, The Brothers Karamazov
Mark Twain: The Adventures of Tom Sawyer, Adventures of Huckleberry Finn, The Prince and the Pauper
George Orwell: Animal Farm, Nineteen Eighty-Four, Homage to Catalonia
Ernest Hemingway: The Old Man and the Sea, A Farewell to Arms, For Whom the Bell Tolls
John Steinbeck: The Grapes of Wrath, Of Mice and Men, East of Eden
Virginia Woolf: Mrs Dalloway, To the Lighthouse, Orlando
James Joyce: Ulysses, Dubliners, Finnegans Wake
Victor Hugo: Les Miserables, The Hunchback of Notre-Dame
Jules Verne: Around the World in Eighty Days
Jules Verne: Journey to the Center of the Earth, The Mysterious Island
Alexandre Dumas: The Three Musketeers, The Count of Monte Cristo
Gustave Flaubert: Madame Bovary, Salammbo
Albert Camus: The Stranger, The Plague, The Fall
Franz Kafka: The Trial, The Castle, The Metamorphosis
Thomas Mann: The Magic Mountain, Buddenbrooks, Death in Venice
Johann Wolfgang von Goethe: Faust, The Sorrows of Young Werther
Homer: The Iliad, The Odyssey
Dante Alighieri: The Divine Comedy, La Vita Nuova
Miguel de Cervantes: Don Quixote, La Galatea
Gabriel Garcia Marquez: One Hundred Years of Solitude, Love in the Time of Cholera
H. G. Wells: The Time Machine, The War of the Worlds, The Invisible Man
Robert Louis Stevenson: Treasure Island, Kidnapped, Strange Case of Dr Jekyll and Mr Hyde
J. R. R. Tolkien: The Hobbit, The Lord of the Rings, The Silmarillion
C. S. Lewis: The Lion, the Witch and the Wardrobe; The Screwtape Letters; Mere Christianity
J. K. Rowling: Harry Potter and the Goblet of Fire, The Casual Vacancy
Agatha Christie: Murder on the Orient Express, Death on the Nile, And Then There Were None
Arthur Conan Doyle: A Study in Scarlet, The Hound of the Baskervilles, The Lost World
Bram Stoker: Dracula, The Lair of the White Worm
Mary Shelley: Frankenstein, The Last Man
Oscar Wilde: The Picture of Dorian Gray, The Importance of Being Earnest
Lewis Carroll: Alice's Adventures in Wonderland, Through the Looking-Glass
Herman Melville: Moby-Dick, Billy Budd, Typee
Nathaniel Hawthorne: The Scarlet Letter, The House of the Seven Gables
F. Scott Fitzgerald: The Great Gatsby, Tender Is the Night, This Side of Paradise
Harper Lee: To Kill a Mockingbird, Go Set a Watchman
J. D. Salinger: The Catcher in the Rye, Franny and Zooey
Stephen King: The Shining, Carrie, Pet Sematary, Misery
Ray Bradbury: Fahrenheit 451, The Martian Chronicles
Aldous Huxley: Brave New World, Island, Point Counter Point
William Golding: Lord of the Flies, Pincher Martin
Toni Morrison: Beloved, Song of Solomon, The Bluest Eye
Kazuo Ishiguro: The Remains of the Day, Never Let Me Go
Margaret Atwood: The Handmaid's Tale, Oryx and Crake, Alias Grace
Salman Rushdie: Midnight's Children, The Satanic Verses
Chinua Achebe: Things Fall Apart, Arrow of God
Umberto Eco: The Name of the Rose, Foucault's Pendulum
Henrik Ibsen: A Doll's House, Hedda Gabler, Peer Gynt
Anton Chekhov: The Cherry Orchard, The Seagull, Uncle Vanya
"""

SETS = {
    "cities": (CITIES, "The city of {} is in {}."),
    "companies": (COMPANIES, "The company {} was founded in {}."),
    "landmarks": (LANDMARKS, "You can find {} in {}."),
    "books": (BOOKS, "{} was written by {}."),
}


def records(name: str = "cities", seed: int = 0) -> list[dict[str, str]]:
    """Return the statements of a set with labels and subjects, as a CSV file would have them."""
    table, sentence = SETS[name]
    known = []
    for line in table.strip().splitlines():
        said, subjects = line.split(": ")
        known += [(one, said) for one in subjects.split("; " if ";" in subjects else ", ")]
    draw, result = random.Random(seed), []
    for one, said in known:
        other = draw.choice([s for _, s in known if s != said])
        for label, named in (("1", said), ("0", other)):
            text = sentence.format(one, named)
            result.append({"statement": text, "label": label, "group": one})
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the statements of a set as CSV.")
    parser.add_argument("name", choices=SETS)
    out = csv.DictWriter(sys.stdout, ["statement", "label", "group"])
    out.writeheader()
    out.writerows(records(parser.parse_args().name))
